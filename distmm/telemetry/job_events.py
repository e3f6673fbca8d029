"""The events by which jobs tell the scheduler what it cannot see. A plan of files imports this, and no scheduler."""

# Topic of Dask's structured events by which jobs report what the scheduler cannot see. Each message is a dictionary
# with "event", "job" and further keys:
#   "begin"                  "path", "kept" (blocks on disk), "note" (an incident before the start), "verb" ("topk")
#   "wave"                   "product": this product is a wave of the job
#   "accepted", "rejected"   "blocks" (rows and columns): results of checks
#   "failed"                 "error": the client found a failure, such as a wrong C
JOB_TOPIC = "distmm-job"
