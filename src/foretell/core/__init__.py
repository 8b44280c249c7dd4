"""Values that everything shares: token trees, keyed noise, sampling parameters, probabilities, errors."""
