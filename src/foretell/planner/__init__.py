"""The cost of a step, its expected tokens, and the depth that each row may guess: numbers only, no model, no drafter,
no engine.

``model.py`` is the cost model: the cost of a step, and the speedup that follows. ``costs.py`` has tables of measured costs,
``measure.py`` fills them by timing steps that the caller runs, ``files.py`` keeps them on disk, ``observed.py`` takes costs
from the steps of a run, and ``corrections.py`` follows the drift while serving. ``acceptance.py`` estimates how many
guesses are kept, ``allocation.py`` searches the best depths for a batch, ``problems.py`` builds its input,
``account.py`` limits the cost of trials, and ``planner.py`` decides, step by step.
"""
