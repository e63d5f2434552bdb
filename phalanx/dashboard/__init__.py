"""What people see of a job in a browser: the dashboard while it runs, the report when it is over.

dashboard_server                  the process that serves the page
dashboard_app, access             its addresses, and who may use them
job_hub                           follows the jobs of this user
prometheus_metrics                the same for Prometheus
report                            the page as one file
page, browser_view, assets/       the page itself, and what it is told of a job
"""
