"""The pipeline of a product in the client's process: operands, plan, graph and sink. `api` and `job` stand on it."""
