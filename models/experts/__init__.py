"""Mixture of experts (MoE): the router, and the GEMMs of the routed experts."""
