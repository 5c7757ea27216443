"""What is measured on a GPU (implementations), and how (measure)."""
