"""What is measured on a GPU (implementations, peers), how (measure, rates), and the tables of it (report)."""
