"""The public functions. They run in the client's process, and return a lazy array, a filled `out` or a verdict."""
