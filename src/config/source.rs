//! Where settings come from: the process's environment, `.env`, and the host it runs on.

use std::ffi::OsString;
use std::fs;
use std::io::{Cursor, ErrorKind};
use std::net::{IpAddr, ToSocketAddrs};
use std::path::Path;

use super::{Config, Problem};

impl Config {
    /// Reads the settings of this process: `.env` in the working directory, and over it the real variables.
    ///
    /// Blocks while BIND_IP is looked up, if it names a host.
    pub fn load() -> Result<Self, Vec<Problem>> {
        let mut vars = dot_env(Path::new(".env")).map_err(|problem| vec![problem])?;
        vars.extend(environment());
        Self::from_vars_on(vars, default_node_name(), resolve)
    }
}

#[expect(clippy::disallowed_methods, reason = "this is where settings are read")]
fn environment() -> Vec<(OsString, OsString)> {
    std::env::vars_os().collect()
}

/// The pairs of an env file, none if there is no such file. Of its content nothing is told but where it is broken.
fn dot_env(path: &Path) -> Result<Vec<(OsString, OsString)>, Problem> {
    let content = match fs::read_to_string(path) {
        Ok(content) => content,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) if error.kind() == ErrorKind::InvalidData => {
            return Err(Problem(".env is not UTF-8 text".to_owned()));
        }
        Err(error) => return Err(Problem(format!(".env cannot be read: {}", error.kind()))),
    };
    let content = content.strip_prefix('\u{feff}').unwrap_or(&content);
    parse(content).ok_or_else(|| {
        let line = broken_line(content);
        Problem(format!(".env accepts lines of NAME=value, got something else in line {line}"))
    })
}

fn parse(content: &str) -> Option<Vec<(OsString, OsString)>> {
    // Without its last line break, a line that ends with a blank counts as unfinished.
    let content = format!("{content}\n");
    let pairs = dotenvy::from_read_iter(Cursor::new(content));
    pairs.map(|pair| pair.ok().map(|(name, value)| (name.into(), value.into()))).collect()
}

/// The number of the first broken line: the one after the longest part that can be read.
///
/// dotenvy's errors tell the text of a line, which may be a secret, and not its place.
fn broken_line(content: &str) -> usize {
    let ends: Vec<usize> = content.match_indices('\n').map(|(end, _)| end).collect();
    let readable = ends.iter().rposition(|end| parse(&content[..*end]).is_some());
    readable.map_or(1, |index| index + 2)
}

/// The host's name and a few random digits, so that nodes started from one image differ.
fn default_node_name() -> String {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host: String = host.trim().chars().filter(char::is_ascii_graphic).take(100).collect();
    let host = if host.is_empty() { "nirn-proxy" } else { &host };
    let mut suffix = [0; 4];
    // Without randomness TLS could not start either; the process's number is the next best thing.
    if aws_lc_rs::rand::fill(&mut suffix).is_err() {
        suffix = std::process::id().to_be_bytes();
    }
    format!("{host}-{:08x}", u32::from_be_bytes(suffix))
}

/// The first address the host has, IPv4 before IPv6.
fn resolve(host: &str) -> Option<IpAddr> {
    let mut addresses: Vec<IpAddr> = (host, 0).to_socket_addrs().ok()?.map(|address| address.ip()).collect();
    addresses.sort_by_key(IpAddr::is_ipv6);
    addresses.first().copied()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn read(content: &[u8]) -> Result<Vec<(OsString, OsString)>, Problem> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(content).unwrap();
        dot_env(file.path())
    }

    #[test]
    fn an_env_file_may_be_missing() {
        assert_eq!(dot_env(Path::new("/nonexistent/.env")), Ok(Vec::new()));
    }

    #[test]
    fn an_env_file_holds_comments_quotes_and_exports() {
        let content =
            b"\xef\xbb\xbf# a comment\n\nPORT=9090\nexport LOG_LEVEL='debug'\nNODE_NAME=\"a b\" # c\nBIND_IP=::1 ";
        let pairs = read(content).unwrap();
        let expected = [("PORT", "9090"), ("LOG_LEVEL", "debug"), ("NODE_NAME", "a b"), ("BIND_IP", "::1")];
        assert_eq!(pairs, expected.map(|(name, value)| (name.into(), value.into())));
    }

    #[test]
    fn a_broken_line_is_told_by_its_number_alone() {
        let cases: [(&[u8], &str); 6] = [
            (b"hunter2", "line 1"),
            (b"PORT=1\n\n# c\nhunter2 hunter2\nhunter2\n", "line 4"),
            (b"A=hunter2\nB=hunter2 hunter2\n", "line 2"),
            (b"A='x\ny\nz'\nB='hunter2\nC=1\n", "line 4"),
            (b"A=1\r\n=hunter2\r\n", "line 2"),
            (b"A=hunter2\n\xff\xfe", "not UTF-8"),
        ];
        for (content, expected) in cases {
            let problem = read(content).unwrap_err().to_string();
            assert!(problem.starts_with(".env ") && problem.contains(expected), "{problem}");
            assert!(!problem.contains("hunter2") && problem.lines().count() == 1, "{problem}");
        }
    }

    #[test]
    fn an_unreadable_env_file_is_a_problem() {
        let folder = tempfile::tempdir().unwrap();
        assert!(dot_env(folder.path()).unwrap_err().to_string().starts_with(".env cannot be read"));
    }

    #[test]
    fn two_starts_on_one_host_get_two_names() {
        let (one, two) = (default_node_name(), default_node_name());
        assert_ne!(one, two);
        assert_eq!(one.rsplit_once('-').map(|(host, _)| host), two.rsplit_once('-').map(|(host, _)| host));
    }

    #[test]
    fn a_host_name_is_resolved() {
        assert!(resolve("localhost").is_some_and(|ip| ip.is_loopback()));
    }
}
