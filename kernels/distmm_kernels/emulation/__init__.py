"""Operands in narrower formats: float32 as two halves, float64 and integers as residues."""
