"""The workers' and the chief's side: connections to servers, requests, and variables as servers hold them."""
