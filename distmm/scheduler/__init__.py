"""In the scheduler's process: where tasks run, which steps are open, and which replicas of blocks are kept."""
