"""Mixtures of experts: the router, and the products of the experts that it picks."""
