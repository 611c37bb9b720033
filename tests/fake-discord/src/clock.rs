//! The only place that reads the wall clock.

use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since the Unix epoch.
#[expect(clippy::disallowed_methods, reason = "this is the one wall-clock read")]
pub fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |elapsed| elapsed.as_secs_f64())
}

/// Milliseconds since the Unix epoch.
pub fn unix_ms() -> u64 {
    (unix_seconds() * 1000.0) as u64
}

/// Now as a `Date` header.
pub fn http_date() -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let seconds = unix_ms() / 1000;
    let (year, month, day) = civil(seconds / 86400);
    let weekday = DAYS[usize::try_from(seconds / 86400 % 7).unwrap_or(0)];
    let month = MONTHS[month.saturating_sub(1)];
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{weekday}, {day:02} {month} {year} {hour:02}:{minute:02}:{second:02} GMT")
}

/// Now as Discord writes times in JSON.
pub fn iso8601() -> String {
    let ms = unix_ms();
    let (year, month, day) = civil(ms / 86_400_000);
    let seconds = ms / 1000;
    let (hour, minute, second, millis) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60, ms % 1000);
    format!("{year}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}000+00:00")
}

/// Year, month and day of a count of days since 1970-01-01.
fn civil(mut days: u64) -> (u64, usize, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 1;
    for length in lengths {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

#[cfg(test)]
mod tests {
    use super::civil;

    #[test]
    fn days_become_dates_over_leap_years() {
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(11_016), (2000, 2, 29));
        assert_eq!(civil(20_421), (2025, 11, 29));
    }
}
