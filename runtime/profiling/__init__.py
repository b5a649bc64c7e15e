"""How long the operators of a stage take on the machine at hand: what is measured, by which ranks, where it lies."""
