"""The comparison of two branches as one page of HTML, and its plots. Below `demo` and the command line."""
