def write_report(run_dirs, out):
    return out
