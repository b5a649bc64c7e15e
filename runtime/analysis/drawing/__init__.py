"""Drawing for pages, figures and terminals: charts as data, their renderers, the timeline, and common page parts."""
