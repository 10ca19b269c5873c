// Puts chunks of 0 to 34 bytes together to full beats of an AXI stream (the paper's alignment
// unit). Takes a chunk in every cycle while the beats leave; chunks of more than 32 bytes fill one
// more beat now and then, and no chunk is taken in that cycle.
module gw_byte_packer (
    input  logic         clk,
    input  logic         rst,
    input  logic [271:0] in_bytes,
    input  logic [  5:0] in_size,
    input  logic         in_last,   // the chunk ends the packet
    input  logic [  3:0] in_user,   // tuser of the packet's last beat; other beats have 0
    input  logic         in_valid,
    output logic         in_ready,

    output logic [255:0] m_axis_tdata,  // 0 where tkeep is 0
    output logic [ 31:0] m_axis_tkeep,
    output logic         m_axis_tlast,
    output logic [  3:0] m_axis_tuser,
    output logic         m_axis_tvalid,
    input  logic         m_axis_tready
);
    // Bytes that no beat has yet. After a chunk of 34 bytes there may be a whole beat of them.
    logic [263:0] held;
    logic [5:0] fill;
    logic ending;  // the packet's last chunk is in `held`
    logic [3:0] ending_user;

    wire free = !m_axis_tvalid || m_axis_tready;
    wire draining = ending || fill[5];
    assign in_ready = free && !draining;
    wire accept = in_valid && in_ready;

    wire [6:0] total = {1'b0, fill} + (accept ? {1'b0, in_size} : 7'd0);
    wire [519:0] shifted = {248'd0, in_bytes} << {fill[4:0], 3'd0};
    logic [519:0] joined;
    always_comb begin
        joined = shifted;
        for (int i = 0; i < 33; i++) if (fill > i[5:0]) joined[8*i+:8] = held[8*i+:8];
    end

    wire finish = ending || (accept && in_last);
    wire emit = free && (total >= 7'd32 || finish);
    wire emit_last = finish && total <= 7'd32;
    always_ff @(posedge clk) begin
        if (rst) begin
            fill   <= 6'd0;
            ending <= 1'b0;
        end else if (emit) begin
            fill   <= emit_last ? 6'd0 : total[5:0] - 6'd32;
            ending <= finish && !emit_last;
        end else begin
            fill <= total[5:0];
        end
        if (emit) held <= joined[519:256];
        else if (accept) held <= joined[263:0];
        if (accept) ending_user <= in_user;
    end

    always_ff @(posedge clk) begin
        if (rst) m_axis_tvalid <= 1'b0;
        else if (free) m_axis_tvalid <= emit;
        if (emit) begin
            for (int i = 0; i < 32; i++) begin
                m_axis_tkeep[i] <= total > i[6:0];
                m_axis_tdata[8*i+:8] <= total > i[6:0] ? joined[8*i+:8] : 8'd0;
            end
            m_axis_tlast <= emit_last;
            m_axis_tuser <= !emit_last ? 4'd0 : ending ? ending_user : in_user;
        end
    end
endmodule
