"""The documents as a site, made by one command: `python -m docs.site`."""
