"""What steps cost: numbers only, no model, no drafter, no engine.

``cost_model.py`` is the cost of a step, and the speedup that follows. ``table.py`` has measured costs, ``measure.py`` fills
it by timing steps that the caller runs, ``files.py`` keeps it on disk, and ``outlook.py`` says by it what guesses would
bring for texts and batches of a size.
"""
