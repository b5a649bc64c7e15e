"""How does it start? Command line, Ray, torchrun."""
