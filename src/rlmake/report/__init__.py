"""report.html: what a run did, on one page that needs no network and no server.

`facts` says what a page is made from, `run.make` writes the page of one run. Pages of grids are to stand beside it.
"""
