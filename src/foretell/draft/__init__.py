"""Floor 3: drafters. Each proposes trees of tokens; none verifies."""
