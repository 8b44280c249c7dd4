"""One request: what is asked, the row that it is decoded as, and what its caller receives."""
