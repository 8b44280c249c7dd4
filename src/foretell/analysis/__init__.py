"""Floor 6: what guesses come to: ``observer.py`` records how often they are kept, ``explain.py`` takes a step apart, and
``words.py`` says it.
"""
