"""Run batch inference over a list of prompts: lease them in order, write the rows of their groups in order."""
