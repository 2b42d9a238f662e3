"""From models and settings to a list of independent jobs; everything that can be checked is checked here."""
