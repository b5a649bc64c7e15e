"""The small operators of a decoder layer, by torch on any device, or in C++ on a CPU."""
