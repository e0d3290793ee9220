"""Figures and tables as the papers have them, and `reproduce`."""
