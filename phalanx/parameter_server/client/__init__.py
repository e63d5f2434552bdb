"""The side of workers and chief: connections to the servers, requests, and variables as servers hold them."""
