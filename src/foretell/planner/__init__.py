"""The cost of a step, its expected tokens, and the depth that each row may guess: numbers only, no model, no drafter,
no engine.

``cost_model.py`` is the cost of a step, and the speedup that follows. ``costs.py`` has tables of measured costs,
``measure.py`` fills them by timing steps that the caller runs, ``files.py`` keeps them on disk, ``run_costs.py`` takes
costs from the steps of a run, and ``corrections.py`` follows the drift while serving. ``acceptance.py`` estimates how
many guesses are kept, ``offers.py`` says what guesses of some rows would bring and cost, ``allocation.py``
(``single.py`` for one row) searches the best depths, ``account.py`` limits the cost of trials, and ``decisions.py``
chooses. ``planner.py`` gives each step its plan (``plan.py``) and learns from what was observed of it, ``layered.py``
does so for methods in two parts; ``ledger.py`` is what both know of a run.
"""
