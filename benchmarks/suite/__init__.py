"""What is measured (cases), how (harness), and what is told of it (report); ``bench.py`` puts them together."""
