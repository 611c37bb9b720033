//! From raw values to checked ones, collecting every problem on the way.

use std::net::IpAddr;
use std::time::Duration;

use http::Uri;
use http::uri::{Authority, Scheme};

use super::table::{Accepts, Variable};
use super::{Overrides, Problem, Seed};

/// Reads values one after another. What cannot be read leaves a problem and some harmless value behind.
#[derive(Default)]
pub(super) struct Reader {
    pub(super) problems: Vec<Problem>,
}

impl Reader {
    /// Notes that the variable's value is not what it accepts.
    pub(super) fn refuse(&mut self, variable: &Variable, got: &str) {
        self.problems.push(Problem::refused(variable, &shown(variable, got)));
    }

    /// A whole number or a number of milliseconds within the variable's range.
    pub(super) fn number(&mut self, given: Option<&str>, variable: &Variable) -> u64 {
        let (Accepts::Number { min, max } | Accepts::Milliseconds { min, max }) = variable.accepts else {
            return 0;
        };
        let text = given.unwrap_or(variable.default);
        match whole_number(text) {
            Some(number) if (min..=max).contains(&number) => number,
            _ => {
                self.refuse(variable, text);
                min
            }
        }
    }

    /// A number that counts things in memory.
    pub(super) fn count(&mut self, given: Option<&str>, variable: &Variable) -> usize {
        usize::try_from(self.number(given, variable)).unwrap_or(usize::MAX)
    }

    /// A port.
    pub(super) fn port(&mut self, given: Option<&str>, variable: &Variable) -> u16 {
        u16::try_from(self.number(given, variable)).unwrap_or(u16::MAX)
    }

    /// A duration in milliseconds.
    pub(super) fn duration(&mut self, given: Option<&str>, variable: &Variable) -> Duration {
        Duration::from_millis(self.number(given, variable))
    }

    /// A switch.
    pub(super) fn switch(&mut self, given: Option<&str>, variable: &Variable) -> bool {
        let text = given.unwrap_or(variable.default);
        match text.to_ascii_lowercase().as_str() {
            "true" | "1" => true,
            "false" | "0" => false,
            _ => {
                self.refuse(variable, text);
                false
            }
        }
    }

    /// One of the variable's words, in lower case.
    pub(super) fn word(&mut self, given: Option<&str>, variable: &Variable) -> &'static str {
        let text = given.unwrap_or(variable.default);
        let Accepts::OneOf(words) = variable.accepts else { return "" };
        words.iter().find(|word| word.eq_ignore_ascii_case(text)).copied().unwrap_or_else(|| {
            self.refuse(variable, text);
            ""
        })
    }

    /// An IP address, if there is one.
    pub(super) fn ip(&mut self, given: Option<&str>, variable: &Variable) -> Option<IpAddr> {
        let text = given?;
        let ip = text.parse().ok();
        if ip.is_none() {
            self.refuse(variable, text);
        }
        ip
    }

    /// The upstream's scheme (true for https) and authority, without the scheme's own port.
    pub(super) fn base_url(&mut self, given: Option<&str>, variable: &Variable) -> (bool, Authority) {
        let text = given.unwrap_or(variable.default);
        base_url(text).unwrap_or_else(|| {
            // An `@` may be the end of a password.
            if text.contains('@') {
                self.problems.push(Problem::refused(variable, ", got one with credentials"));
            } else {
                self.refuse(variable, text);
            }
            (true, Authority::from_static("discord.com"))
        })
    }

    /// The URL of an outbound proxy, if there is one.
    pub(super) fn proxy_url(&mut self, given: Option<&str>, variable: &Variable) -> Option<String> {
        let text = given?;
        if is_proxy_url(text) {
            return Some(text.to_owned());
        }
        self.refuse(variable, text);
        None
    }

    /// The list of global limits. Every bad entry is named by its place.
    pub(super) fn overrides(&mut self, given: Option<&str>, variable: &Variable) -> Overrides {
        let mut overrides = Overrides::default();
        let Some(text) = given else { return overrides };
        let mut wrong = Vec::new();
        for (place, entry) in (1..).zip(text.split(',')) {
            let entry = entry.trim();
            match parse_override(entry) {
                None => wrong.push(format!("entry {place} is {}", shown_override(entry))),
                Some(parsed) => {
                    let twice = match parsed {
                        (Key::Bot(id), limit) => overrides.by_bot_id.insert(id, limit).is_some(),
                        (Key::Sha256(key), limit) => overrides.by_key.insert(key, limit).is_some(),
                    };
                    if twice {
                        wrong.push(format!("entry {place} names a credential a second time"));
                    }
                }
            }
        }
        if !wrong.is_empty() {
            self.problems.push(Problem::refused(variable, &format!("; {}", wrong.join("; "))));
        }
        overrides
    }

    /// A list of `host[:port]`, port as given when an entry has none.
    pub(super) fn seeds(&mut self, given: Option<&str>, variable: &Variable, port: u16) -> Vec<Seed> {
        let Some(text) = given else { return Vec::new() };
        let seeds: Option<Vec<Seed>> = text.split(',').map(|entry| parse_seed(entry.trim(), port)).collect();
        seeds.unwrap_or_else(|| {
            self.refuse(variable, text);
            Vec::new()
        })
    }
}

/// What was got, as the end of a problem's line: one line whatever is in it, and nothing of a secret.
fn shown(variable: &Variable, got: &str) -> String {
    const LONGEST: usize = 100;
    if variable.secret {
        return String::new();
    }
    match got.char_indices().nth(LONGEST) {
        None => format!(", got {got:?}"),
        Some((end, _)) => format!(", got {:?} and more", &got[..end]),
    }
}

/// Digits only: no sign, no blanks, no separators.
fn whole_number(text: &str) -> Option<u64> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
}

fn base_url(text: &str) -> Option<(bool, Authority)> {
    // `Uri` drops a fragment without a word.
    if text.contains(['#', '?', '@']) {
        return None;
    }
    let uri: Uri = text.parse().ok()?;
    let https = if uri.scheme() == Some(&Scheme::HTTPS) {
        true
    } else if uri.scheme() == Some(&Scheme::HTTP) {
        false
    } else {
        return None;
    };
    if !matches!(uri.path(), "" | "/") {
        return None;
    }
    let authority = uri.authority()?;
    match host_and_port(authority.as_str())? {
        (_, None) => Some((https, authority.clone())),
        (host, Some(port)) if port == if https { 443 } else { 80 } => Some((https, host.parse().ok()?)),
        (_, Some(_)) => Some((https, authority.clone())),
    }
}

/// `http` takes an authority with any digits, or none, for a port: here it is 1 to 65535 or not there.
fn host_and_port(authority: &str) -> Option<(&str, Option<u16>)> {
    let end = authority.rfind(']').map_or(0, |bracket| bracket + 1);
    let (host, port) = match authority[end..].find(':') {
        None => (authority, None),
        Some(colon) => {
            let (host, port) = authority.split_at(end + colon);
            (host, Some(whole_number(&port[1..]).and_then(|port| u16::try_from(port).ok()).filter(|port| *port > 0)?))
        }
    };
    (!host.is_empty()).then_some((host, port))
}

/// As the tunnel understands them: http or https, or none, which is http.
fn is_proxy_url(text: &str) -> bool {
    let Ok(uri) = text.parse::<Uri>() else { return false };
    let known = uri.scheme().is_none_or(|scheme| *scheme == Scheme::HTTP || *scheme == Scheme::HTTPS);
    let Some(authority) = uri.authority() else { return false };
    let host = authority.as_str().rsplit_once('@').map_or(authority.as_str(), |(_, host)| host);
    known && host_and_port(host).is_some() && matches!(uri.path(), "" | "/") && uri.query().is_none()
}

enum Key {
    Bot(u64),
    Sha256([u8; 32]),
}

fn parse_override(entry: &str) -> Option<(Key, u32)> {
    let (credential, limit) = entry.rsplit_once(':')?;
    let limit = whole_number(limit.trim()).and_then(|limit| u32::try_from(limit).ok()).filter(|limit| *limit > 0)?;
    let credential = credential.trim();
    let key = match credential.split_once(':') {
        Some((scheme, hex)) if scheme.trim() == "sha256" => Key::Sha256(parse_sha256(hex.trim())?),
        Some(_) => return None,
        None if (1..=20).contains(&credential.len()) => Key::Bot(whole_number(credential)?),
        None => return None,
    };
    Some((key, limit))
}

fn parse_sha256(hex: &str) -> Option<[u8; 32]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let (pairs, rest) = hex.as_bytes().as_chunks::<2>();
    if pairs.len() != 32 || !rest.is_empty() {
        return None;
    }
    let mut key = [0; 32];
    for (byte, [high, low]) in key.iter_mut().zip(pairs) {
        *byte = digit(*high)? << 4 | digit(*low)?;
    }
    Some(key)
}

/// A bad entry as it may be shown: whoever mistakes the list for one of tokens must not find theirs in a log.
fn shown_override(entry: &str) -> String {
    const LONGEST: usize = 32;
    let harmless = entry.bytes().all(|byte| byte.is_ascii_digit() || b":- ".contains(&byte));
    match entry {
        "" => "empty".to_owned(),
        entry if harmless && entry.len() <= LONGEST => format!("{entry:?}"),
        _ => "neither (not shown, it may hold a token)".to_owned(),
    }
}

fn parse_seed(entry: &str, port: u16) -> Option<Seed> {
    if let Ok(ip) = entry.parse::<IpAddr>() {
        return Some(Seed { host: ip.to_string(), port });
    }
    let (host, port) = match entry.rsplit_once(':') {
        None => (entry, port),
        Some((host, digits)) => {
            (host, whole_number(digits).and_then(|port| u16::try_from(port).ok()).filter(|port| *port > 0)?)
        }
    };
    if let Some(v6) = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return Some(Seed { host: v6.parse::<std::net::Ipv6Addr>().ok()?.to_string(), port });
    }
    is_host_name(host).then(|| Seed { host: host.to_owned(), port })
}

/// Whether it can be a name in DNS or in `/etc/hosts`.
pub(super) fn is_host_name(text: &str) -> bool {
    let letters = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=253).contains(&text.len()) && text.bytes().all(letters) && !text.starts_with(['.', '-'])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::table;

    #[test]
    fn a_base_url_is_a_scheme_and_an_authority() {
        let good = [
            ("https://discord.com", true, "discord.com"),
            ("https://discord.com/", true, "discord.com"),
            ("HTTPS://discord.com:443", true, "discord.com"),
            ("https://discord.com:80", true, "discord.com:80"),
            ("http://127.0.0.1:8000", false, "127.0.0.1:8000"),
            ("http://fake:80/", false, "fake"),
            ("http://[::1]:8000", false, "[::1]:8000"),
            ("http://[::1]:80", false, "[::1]"),
        ];
        for (text, https, authority) in good {
            assert_eq!(base_url(text), Some((https, Authority::from_static(authority))), "{text}");
        }
        let bad = [
            "discord.com",
            "//discord.com",
            "ftp://discord.com",
            "https://",
            "https:///api",
            "https://discord.com/api",
            "https://discord.com?x=1",
            "https://discord.com/#x",
            "https://me:hunter2@discord.com",
            "https://discord.com:",
            "https://discord.com:0",
            "https://discord.com:65536",
            "https://:443",
            "https://dis cord.com",
            "/",
            "*",
        ];
        for text in bad {
            assert_eq!(base_url(text), None, "{text}");
        }
    }

    #[test]
    fn credentials_in_the_base_url_are_not_shown() {
        let mut reader = Reader::default();
        reader.base_url(Some("https://me:hunter2@discord.com"), &table::DISCORD_API_URL);
        assert_eq!(reader.problems.len(), 1);
        assert!(!reader.problems[0].to_string().contains("hunter2"));
    }

    #[test]
    fn overrides_name_bots_and_hashes() {
        let hash = "00ff".repeat(16);
        let text = format!(" 80351110224678912:1200 , sha256:{hash} : 75,1:1");
        let mut reader = Reader::default();
        let overrides = reader.overrides(Some(&text), &table::BOT_RATELIMIT_OVERRIDES);
        assert!(reader.problems.is_empty());
        assert_eq!(overrides.by_bot_id.get(&80351110224678912), Some(&1200));
        assert_eq!(overrides.by_bot_id.get(&1), Some(&1));
        let mut key = [0; 32];
        key.iter_mut().skip(1).step_by(2).for_each(|byte| *byte = 255);
        assert_eq!(overrides.by_key.get(&key), Some(&75));
        assert_eq!(overrides.len(), 3);
    }

    #[test]
    fn a_bad_override_is_told_by_its_place_and_without_what_may_be_a_token() {
        let upper = format!("sha256:{}:5", "AB".repeat(32));
        let cases = [
            ("", "entry 1 is empty"),
            ("1:5,", "entry 2 is empty"),
            ("1:0", "entry 1 is \"1:0\""),
            ("1:-5", "entry 1 is \"1:-5\""),
            ("1", "entry 1 is \"1\""),
            ("1:4294967296", "entry 1 is"),
            ("99999999999999999999:5", "entry 1 is"),
            ("2:5,MTIz.hunter2.x:50", "entry 2 is neither"),
            ("sha256:hunter2:5", "entry 1 is neither"),
            (&upper, "entry 1 is neither"),
            ("1:5, 01:6", "entry 2 names a credential a second time"),
        ];
        for (text, expected) in cases {
            let mut reader = Reader::default();
            reader.overrides(Some(text), &table::BOT_RATELIMIT_OVERRIDES);
            let [problem] = &reader.problems[..] else { panic!("{text}: {:?}", reader.problems) };
            let problem = problem.to_string();
            assert!(problem.contains(expected) && !problem.contains("hunter2"), "{text}: {problem}");
        }
    }

    #[test]
    fn a_long_value_is_not_repeated_in_full() {
        let mut reader = Reader::default();
        reader.number(Some(&"é".repeat(10_000)), &table::PORT);
        assert!(reader.problems[0].to_string().len() < 400);
    }
}
