"""The Hopper kernel and the instructions that it is made of."""
