//! Options of the command line whose work is not in this build: listed in the help, refused when given.
//!
//! A feature that arrives takes its row out of the table and becomes a typed argument in `args.rs`.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

struct Row {
    heading: &'static str,
    long: &'static str,
    /// Empty for a flag.
    value: &'static str,
    help: &'static str,
}

const fn row(heading: &'static str, long: &'static str, value: &'static str, help: &'static str) -> Row {
    Row {
        heading,
        long,
        value,
        help,
    }
}

const DEVICE: &str = "Model and device";
const ROUTE: &str = "Prefill and numerical route";

#[rustfmt::skip]
const ROWS: &[Row] = &[
    row(DEVICE, "devices", "A,B,...", "Pipeline stages, one per GPU"),
    row(DEVICE, "mtp-experts-q4", "", "Experts of the multi-token predictor at 4 bits"),
    row(ROUTE, "fast-path", "NAME", "Also run this fast path (repeatable)"),
    row(ROUTE, "prefill-cublas", "", "Score through the cuBLAS prefill route"),
    row(ROUTE, "no-prefill-cublas-projections", "", "Keep input projections off the cuBLAS route"),
];

/// The unavailable options that were typed, in table order.
#[derive(Debug, Default)]
pub(crate) struct Unbuilt {
    pub(crate) given: Vec<&'static str>,
}

impl Args for Unbuilt {
    fn augment_args(mut command: Command) -> Command {
        for row in ROWS {
            let arg = Arg::new(row.long)
                .long(row.long)
                .help(format!("{} [not in this build]", row.help))
                .help_heading(row.heading);
            command = command.arg(if row.value.is_empty() {
                arg.action(ArgAction::SetTrue)
            } else {
                arg.action(ArgAction::Append)
                    .value_name(row.value)
                    .allow_hyphen_values(true)
            });
        }
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Unbuilt {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let typed = |row: &&Row| matches.value_source(row.long) == Some(clap::parser::ValueSource::CommandLine);
        Ok(Self {
            given: ROWS.iter().filter(typed).map(|row| row.long).collect(),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
