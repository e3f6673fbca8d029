"""In the scheduler's process: where tasks run, which steps are open, and which copies of blocks are kept."""
