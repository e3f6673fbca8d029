"""Batch jobs: a job file is rendered, submitted and followed, on this machine, Slurm or Kubernetes."""
