"""Calls of tools: how they are asked for, written by models, made sure of and read."""
