"""`rlcourse speedrun`: how fast does a recipe reach the goal? The verifier is out here, the recipe in a box."""
