//! Taking a multipart body apart.

/// One part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part<'a> {
    pub(super) name: String,
    pub(super) filename: Option<String>,
    pub(super) content_type: Option<String>,
    pub(super) data: &'a [u8],
}

/// The boundary in a `Content-Type` of multipart.
pub(super) fn boundary(content_type: &str) -> Option<&str> {
    if !content_type.to_ascii_lowercase().starts_with("multipart/") {
        return None;
    }
    let parameter = content_type.split(';').skip(1).find_map(|part| part.trim().strip_prefix("boundary="))?;
    Some(parameter.trim_matches('"'))
}

/// The parts between boundaries; what is malformed is left out.
pub(super) fn parts<'a>(body: &'a [u8], boundary: &str) -> Vec<Part<'a>> {
    let marker = format!("\r\n--{boundary}").into_bytes();
    // The first boundary may stand at the very beginning.
    let mut rest = match body.strip_prefix(&marker[2..]) {
        Some(rest) => rest,
        None => match find(body, &marker) {
            Some(at) => &body[at + marker.len()..],
            None => return Vec::new(),
        },
    };
    let mut parts = Vec::new();
    while let (false, Some(end)) = (rest.starts_with(b"--"), find(rest, &marker)) {
        parts.extend(part(&rest[..end]));
        rest = &rest[end + marker.len()..];
    }
    parts
}

fn part(raw: &[u8]) -> Option<Part<'_>> {
    let end = find(raw, b"\r\n\r\n")?;
    let head = String::from_utf8_lossy(&raw[..end]);
    let header = |name: &str| {
        let lines = head.lines().filter_map(|line| line.split_once(':'));
        lines
            .into_iter()
            .find(|(key, _)| key.trim().eq_ignore_ascii_case(name))
            .map(|(_, value)| value.trim().to_owned())
    };
    let disposition = header("content-disposition")?;
    let parameter = |name: &str| {
        let start = disposition.find(&format!(" {name}="))? + name.len() + 2;
        let value = disposition[start..].trim_start();
        let value = match value.strip_prefix('"') {
            Some(quoted) => quoted.split('"').next(),
            None => value.split(';').next(),
        };
        value.map(str::to_owned)
    };
    Some(Part {
        name: parameter("name")?,
        filename: parameter("filename"),
        content_type: header("content-type"),
        data: &raw[end + 4..],
    })
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    let first = *needle.first()?;
    let mut from = 0;
    while let Some(at) = haystack[from..].iter().position(|&byte| byte == first) {
        if haystack[from + at..].starts_with(needle) {
            return Some(from + at);
        }
        from += at + 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_keep_their_bytes_names_and_types() {
        let body = b"--B\r\nContent-Disposition: form-data; name=\"payload_json\"\r\n\r\n{}\r\n\
            --B\r\ncontent-disposition: form-data; name=\"files[0]\"; filename=\"a b.bin\"\r\nContent-Type: image/png\r\n\r\n\
            \x00\r\n--not it\xff\r\n--B--\r\n";
        let parts = parts(body, boundary("multipart/form-data; boundary=B").unwrap());
        assert_eq!(parts.len(), 2);
        assert_eq!((parts[0].name.as_str(), parts[0].data), ("payload_json", &b"{}"[..]));
        assert_eq!(parts[1].filename.as_deref(), Some("a b.bin"));
        assert_eq!(parts[1].content_type.as_deref(), Some("image/png"));
        assert_eq!(parts[1].data, b"\x00\r\n--not it\xff");
        assert_eq!(boundary("application/json"), None);
    }
}
