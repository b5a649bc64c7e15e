"""The documents as a site, made by one command: `python -m docs.site`.

Sphinx, MyST and Furo make it, since they are maintained and fail at what is wrong; MkDocs and its Material theme get no
more features.
"""
