"""Charts as SVG text: colours are the page's variables, every mark carries its value."""
