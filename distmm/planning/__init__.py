"""Pure: a product, its blocks, a cluster in figures, and the plan that they lead to."""
