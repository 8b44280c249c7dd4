"""Floor 1: what speculative decoding can reach. Pure mathematics: no models, no IO, no state.

``acceptance``: the chance that one guess is kept. ``shape``: the best tree of a size. ``run_costs``: what steps
took. All in float64; p is the target, q the draft. ``benchmarks/theory`` has more of it.
"""
