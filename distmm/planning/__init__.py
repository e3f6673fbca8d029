"""Pure: a product and a cluster in figures lead to a plan. README.md says what is where."""
