//! `merge`: the reports of all shards become the report of the whole run.

use std::path::Path;

use perplexity_eval::merge::merge;
use perplexity_eval::output;
use perplexity_eval::report::{FILE_NAME, Report};
use perplexity_eval::table;

use crate::Failure;
use crate::args::MergeArgs;
use crate::directory::OutputDirectory;
use crate::options::UsageError;

/// Joins the reports that `args` name, writes the result and returns its table for standard output.
pub(crate) fn run(args: &MergeArgs) -> Result<Vec<u8>, Failure> {
    output::check(&args.output).map_err(UsageError::Output)?;
    let parts = args.reports.iter().map(|path| read(path)).collect::<Result<_, _>>()?;
    let report = merge(parts).map_err(Failure::failed)?;
    let directory = OutputDirectory::prepare(args.output.clone())?;
    report.write(directory.path()).map_err(Failure::failed)?;
    let mut text = Vec::new();
    table::write(&mut text, &report, &directory.keep().join(FILE_NAME)).map_err(Failure::failed)?;
    Ok(text)
}

fn read(path: &Path) -> Result<Report, Failure> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| Failure::failed(format!("cannot read {}: {error}", path.display())))?;
    Report::from_json(&text).map_err(|error| Failure::failed(format!("{}: {error}", path.display())))
}
