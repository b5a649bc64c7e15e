"""What pages, figures and terminals are made of: charts as data, their drawing, the timeline, parts of a page."""
