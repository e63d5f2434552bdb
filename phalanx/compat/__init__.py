"""What programs written for other libraries expect to find here."""
