"""Floor 2.5: what trained heads of any method share: modules, checkpoints in the layouts of other engines, their keys, the
interface of training objectives. Weights, configurations and formats; no guessing.
"""
