"""Small trainings with one loss each, on scikit-learn's digits: ``python -m examples.losses``."""
