"""What is measured on a GPU (implementations), how (measure), and the tables of it (report)."""
