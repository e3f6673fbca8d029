"""In the processes of the workers: tasks, GPU streams, slots, and the memory of the GPU."""
