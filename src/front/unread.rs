//! Requests whose head hyper cannot read. It answers them by itself and tells nobody before that answer is written, so
//! the answer is known by its bytes and replaced by the proxy's own.

use crate::error::ProxyError;

/// How hyper's own answers go on after their status line. No other answer does: a client never gets Discord's `Connection`,
/// and what hyper adds to an answer follows the fields that it has.
const BARE: &[u8] = b"\r\nconnection: close\r\ncontent-length: 0\r\ndate: ";
/// A date, and the end of the head.
const DATE: usize = "Sun, 06 Nov 1994 08:49:37 GMT\r\n\r\n".len();

/// What a client is told whose request hyper could not read.
pub fn error(too_large: bool) -> ProxyError {
    if too_large {
        ProxyError::HeadTooLarge
    } else {
        ProxyError::BadRequest(
            "the request is not HTTP, or its method, target, a header line or its length is malformed",
        )
    }
}

/// The bytes to write in place of `bytes`, if they are an answer of hyper's own.
pub fn in_place_of(bytes: &[u8]) -> Option<Vec<u8>> {
    let answer = bytes.strip_prefix(b"HTTP/1.1 4")?;
    let end = answer.iter().position(|&byte| byte == b'\r')?;
    let (status, fields) = answer.split_at(end);
    let date = fields.strip_prefix(BARE).filter(|date| date.len() == DATE)?;
    let error = match status.get(..2)? {
        b"00" => error(false),
        b"14" | b"31" => error(true),
        _ => return None,
    };
    let response = error.response();
    let mut own = format!("HTTP/1.1 {}\r\n", response.status()).into_bytes();
    for (name, value) in response.headers() {
        own.extend([name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat());
    }
    own.extend([b"connection: close\r\ndate: ", date, response.body()].concat());
    Some(own)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHEN: &str = "date: Mon, 30 Nov 2026 10:09:23 GMT\r\n\r\n";

    #[test]
    fn an_answer_of_hypers_own_is_replaced_and_keeps_its_date() {
        for (status, text) in [
            ("400 Bad Request", "malformed"),
            ("431 Request Header Fields Too Large", "64 KiB"),
            ("414 URI Too Long", "64 KiB"),
        ] {
            let bare = format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n{WHEN}");
            let own = String::from_utf8(in_place_of(bare.as_bytes()).unwrap()).unwrap();
            let (head, body) = own.split_once("\r\n\r\n").unwrap();
            let expected = if status.starts_with("400") { status } else { "431 Request Header Fields Too Large" };
            assert!(head.starts_with(&format!("HTTP/1.1 {expected}\r\n")), "{head}");
            assert!(head.ends_with(WHEN.trim_end()) && head.contains("\r\nconnection: close\r\n"), "{head}");
            assert!(head.contains(&format!("\r\ncontent-length: {}\r\n", body.len())), "{head}");
            assert!(body.contains(text), "{body}");
        }
    }

    #[test]
    fn any_other_answer_stays_as_it_is() {
        for other in [
            format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n{WHEN}"),
            format!("HTTP/1.1 404 Not Found\r\nconnection: close\r\ncontent-length: 0\r\n{WHEN}"),
            format!("HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n{WHEN}"),
            format!("HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n{WHEN}"),
            format!("HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n{WHEN}HTTP/1.1 200 OK\r\n"),
            "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\ndate: ".into(),
            "HTTP/1.1 4".into(),
            String::new(),
        ] {
            assert_eq!(in_place_of(other.as_bytes()), None, "{other}");
        }
    }
}
