//! Numbers and names as people read them in log lines and tables.

/// Thousands separated by commas: `1,048,576`.
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Binary units: plain `B` below 1024, else two decimals below 10 and one from 10 up: `17.3 GiB`.
pub fn bytes(value: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if value < 1024 {
        return format!("{value} B");
    }
    let mut scaled = value as f64 / 1024.0;
    let mut unit = 0;
    // One decimal is the coarsest shown, so this is where the next unit begins.
    while scaled >= 1023.95 && unit + 1 < UNITS.len() {
        scaled /= 1024.0;
        unit += 1;
    }
    format!("{} {}", two_or_one(scaled), UNITS[unit])
}

/// `812 us`, `8.12 ms`, `81.2 ms`, `812 ms`, `12.3s`, `3m 4.5s`, `2h 7m`; `n/a` when negative or not finite.
pub fn duration(seconds: f64) -> String {
    if !(seconds.is_finite() && seconds >= 0.0) {
        return "n/a".into();
    }
    // Each limit is where the coarser form takes over after rounding.
    let micros = (seconds * 1e6).round();
    if micros < 1000.0 {
        return format!("{micros:.0} us");
    }
    let millis = seconds * 1e3;
    if millis < 999.5 {
        let decimals = if millis < 9.995 {
            2
        } else if millis < 99.95 {
            1
        } else {
            0
        };
        return format!("{millis:.decimals$} ms");
    }
    if seconds < 59.95 {
        return format!("{seconds:.1}s");
    }
    let tenths = (seconds * 10.0).round();
    if tenths < 36_000.0 {
        let minutes = (tenths / 600.0).floor();
        return format!("{minutes:.0}m {:.1}s", (tenths - minutes * 600.0) / 10.0);
    }
    let minutes = (seconds / 60.0).round();
    let hours = (minutes / 60.0).floor();
    format!("{hours:.0}h {:.0}m", minutes - hours * 60.0)
}

/// Decimal units: one decimal below 1000, else two below 10 and one from 10 up: `5.31k tok/s`.
pub fn rate(per_second: f64, unit: &str) -> String {
    if !(per_second.is_finite() && per_second >= 0.0) {
        return "n/a".into();
    }
    if per_second < 999.95 {
        return format!("{per_second:.1} {unit}/s");
    }
    let mut scaled = per_second / 1000.0;
    let mut prefix = 'k';
    for next in ['M', 'G', 'T'] {
        if scaled < 999.95 {
            break;
        }
        scaled /= 1000.0;
        prefix = next;
    }
    format!("{}{prefix} {unit}/s", two_or_one(scaled))
}

fn two_or_one(value: f64) -> String {
    let decimals = if value < 9.995 { 2 } else { 1 };
    format!("{value:.decimals$}")
}

/// `digits` significant digits, trailing zeros dropped, exponent form outside `1e-4 ..= 10^digits`: `5.20698`.
pub fn significant(value: f64, digits: usize) -> String {
    if !value.is_finite() {
        return "n/a".into();
    }
    let digits = digits.max(1);
    let scientific = format!("{value:.*e}", digits - 1);
    let exponent = scientific
        .split_once('e')
        .and_then(|(_, e)| e.parse::<i32>().ok())
        .unwrap_or(0);
    if exponent < -4 || exponent >= digits as i32 {
        return exponent_form(value, digits - 1);
    }
    let fixed = format!("{value:.*}", (digits as i32 - 1 - exponent).max(0) as usize);
    match fixed.contains('.') {
        true => fixed.trim_end_matches('0').trim_end_matches('.').into(),
        false => fixed,
    }
}

/// Six decimals, exponent form where they take more than `width` characters.
pub fn column(value: f64, width: usize) -> String {
    let fixed = format!("{value:.6}");
    match fixed.len() <= width {
        true => fixed,
        // Sign, point and `e+308`.
        false => exponent_form(value, width.saturating_sub(8)),
    }
}

/// One line without control characters: a name from a file may hold anything, a terminal would obey it.
pub fn printable(text: &str) -> String {
    let clean = |c: char| match c {
        '\n' | '\r' | '\t' => ' ',
        c if c.is_control() => '?',
        c => c,
    };
    text.chars().map(clean).collect()
}

/// Scientific notation with a sign and at least two digits in the exponent: `2.6300e-02`.
pub fn exponent_form(value: f64, decimals: usize) -> String {
    if !value.is_finite() {
        return "n/a".into();
    }
    let text = format!("{value:.decimals$e}");
    match text.split_once('e') {
        Some((mantissa, exponent)) => {
            let (sign, digits) = exponent
                .strip_prefix('-')
                .map_or(('+', exponent), |digits| ('-', digits));
            format!("{mantissa}e{sign}{digits:0>2}")
        }
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_grouped() {
        let cases = [
            (0, "0"),
            (999, "999"),
            (1000, "1,000"),
            (258_525, "258,525"),
            (1_048_576, "1,048,576"),
        ];
        for (value, expected) in cases {
            assert_eq!(count(value), expected);
        }
        assert_eq!(count(u64::MAX), "18,446,744,073,709,551,615");
    }

    #[test]
    fn bytes_use_binary_units() {
        let cases = [
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (10_235, "10.0 KiB"),
            (1_048_575, "1.00 MiB"),
            (18_575_735_521, "17.3 GiB"),
            (u64::MAX, "16.0 EiB"),
        ];
        for (value, expected) in cases {
            assert_eq!(bytes(value), expected);
        }
    }

    #[test]
    fn durations_change_form_after_rounding() {
        let cases = [
            (0.0, "0 us"),
            (0.000_812, "812 us"),
            (0.000_999_9, "1.00 ms"),
            (0.008_124, "8.12 ms"),
            (0.009_999, "10.0 ms"),
            (0.0812, "81.2 ms"),
            (0.812, "812 ms"),
            (0.9996, "1.0s"),
            (12.34, "12.3s"),
            (59.96, "1m 0.0s"),
            (184.5, "3m 4.5s"),
            (3599.96, "1h 0m"),
            (7619.0, "2h 7m"),
            (-1.0, "n/a"),
            (f64::NAN, "n/a"),
        ];
        for (value, expected) in cases {
            assert_eq!(duration(value), expected, "{value}");
        }
    }

    #[test]
    fn rates_use_decimal_units() {
        let cases = [
            (812.34, "812.3 tok/s"),
            (999.97, "1.00k tok/s"),
            (5314.0, "5.31k tok/s"),
            (14_600.0, "14.6k tok/s"),
            (999_960.0, "1.00M tok/s"),
            (f64::INFINITY, "n/a"),
        ];
        for (value, expected) in cases {
            assert_eq!(rate(value, "tok"), expected);
        }
    }

    #[test]
    fn significant_digits_and_exponents() {
        let cases = [
            (5.206_98, "5.20698"),
            (4.7, "4.7"),
            (1_234.567_89, "1234.57"),
            (1_234_567.0, "1.23457e+06"),
        ];
        for (value, expected) in cases {
            assert_eq!(significant(value, 6), expected);
        }
        assert_eq!(significant(999_999.6, 6), "1.00000e+06");
        assert_eq!(significant(0.000_05, 6), "5.00000e-05");
        assert_eq!(significant(0.0, 6), "0");
        assert_eq!(exponent_form(0.0263, 4), "2.6300e-02");
        assert_eq!(exponent_form(-1.5e120, 2), "-1.50e+120");
        assert_eq!(exponent_form(0.0, 4), "0.0000e+00");
    }

    #[test]
    fn a_column_keeps_its_width() {
        assert_eq!(column(38.870444, 15), "38.870444");
        assert_eq!(column(-0.000001, 15), "-0.000001");
        assert_eq!(column(12345678.123456, 15), "12345678.123456");
        assert_eq!(column(970_391_233_872.0, 15), "9.7039123e+11");
        for value in [f64::MAX, f64::MIN, f64::MIN_POSITIVE, 123_456_789.5, -99_999_999.5] {
            let text = column(value, 15);
            assert!(text.len() <= 15, "{text}");
        }
    }

    #[test]
    fn a_name_is_one_printable_line() {
        assert_eq!(printable("a\nb\r\tc\x1b[2Jd\u{7f}e\u{9b}漢"), "a b  c?[2Jd?e?漢");
    }
}
