"""How deep each row may guess in the next step: numbers only, no model, no drafter, no engine.

``planner.py`` gives each step its plan (``plan.py``) and learns from what was observed of it (``observations.py``). It asks
``offers.py`` what guesses would bring and cost, of one row (``single.py``) or several (``several.py``, by the search of
``allocation.py``), and ``decisions.py`` who guesses; ``budget.py`` limits what trials cost. ``acceptance.py`` estimates how
many guesses are kept, ``shares.py`` whose they are, and ``corrections.py`` follows what live steps say of the table of
costs. docs/planner.md leads from costs to a decision.
"""
